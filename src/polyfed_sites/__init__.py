"""What a real site needs, whatever carries its messages: its own state, kept safe, and its side of an exchange."""
