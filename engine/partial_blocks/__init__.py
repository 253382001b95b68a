"""Keeps the last, partial blocks of answers at the worker that wrote them, for the next turns of conversations."""
