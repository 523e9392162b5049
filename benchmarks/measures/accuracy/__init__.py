"""What is predicted beside what is measured: memory, whether a plan fits, step time, and what planning costs."""
