"""Every key of DeepSpeed's config as a record: its spellings, type and default, and its outcome."""
