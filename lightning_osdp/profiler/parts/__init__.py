"""Parts of a model's profile, from the trace and the times of its step."""
