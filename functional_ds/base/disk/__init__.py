"""Files that survive a crash, reads of bounded size, and reads and writes past the page cache."""
