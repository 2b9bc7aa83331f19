"""What development needs: an embedded PostgreSQL and the development server."""
