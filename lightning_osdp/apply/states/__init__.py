"""States of modules and optimizers under the user's own names, saved and loaded."""
