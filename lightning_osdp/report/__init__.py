"""A plan for people: a table of units and why each is as it is, a picture, and predictions beside what was measured."""
