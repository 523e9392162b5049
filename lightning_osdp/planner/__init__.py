"""Planner: a profile, a cluster and a limit of memory give a plan. No part of it imports torch."""
