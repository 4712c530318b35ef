"""What the router tells of itself: records, figures, decisions and their reasons."""
