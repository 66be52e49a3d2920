"""Other people's libraries, running on quire. Nothing here is imported by `import quire`."""
