"""What every Django package of the server stands on: people, the database, hints, the base of admin pages."""
