"""Equal blocks in a row, of which a few are followed for all."""
