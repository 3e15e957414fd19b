"""ears, thinker, talker, code2wav: talk to it."""
