"""Plans of a fit that goes on: which ones race, when, what races teach, and which has room for longer batches."""
