"""A byte-level minGPT, trained with plain Lightning code under any strategy."""
