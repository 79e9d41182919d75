"""Chapter D."""

from experiments.claims.record import Chapter, Words

chapter = Chapter("D", Words("", ""))
