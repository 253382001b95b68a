"""The decode service: remnants and decodes under one token budget, streams out."""
