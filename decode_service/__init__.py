"""The decode service: prompt tails and decodes under one token budget, streams out."""
