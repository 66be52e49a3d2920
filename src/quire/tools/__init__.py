"""The commands of the command line, and what they share: colours, measuring, the demo."""
