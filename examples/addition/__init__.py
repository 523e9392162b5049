"""A GPT that learns to add two numbers of two digits, the task of minGPT's adder."""
