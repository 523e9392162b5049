"""Problems for the planner, and what solving them costs."""
