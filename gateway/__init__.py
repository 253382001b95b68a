"""The public edge: admission, tokenizing, planning, and the one stream that a client sees. Imports no torch."""
