"""Codecs for payloads, collectives that travel through them, and error feedback."""
