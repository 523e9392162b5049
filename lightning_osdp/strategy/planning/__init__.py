"""Planning for a Trainer that is about to fit."""
