"""Codecs, compressed collectives and error feedback."""
