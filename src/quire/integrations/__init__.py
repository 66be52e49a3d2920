"""quire in other libraries. `import quire` imports nothing from here."""
