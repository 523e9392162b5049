"""What operators in slices cost and save."""
