"""The subcommands of ``kvport``, one module each; :data:`kvport.cli.COMMANDS` is their table."""
