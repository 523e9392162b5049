"""The ranks' processes: how they start, agree, fail and end."""
