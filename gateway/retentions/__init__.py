"""Keeps the KV of conversations as long as their next turns are expected, by what it learned of each tenant's tools."""
