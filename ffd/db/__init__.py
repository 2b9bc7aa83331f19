"""The database: connections, statements, notifications, migrations."""
