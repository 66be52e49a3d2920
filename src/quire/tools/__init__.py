"""What people look at: the command line, stages of the compiler, explanations, the demo."""
