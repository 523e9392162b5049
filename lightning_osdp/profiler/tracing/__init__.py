"""One step followed through its modules: what runs when, and which bytes live."""
