"""Chapter B."""

from experiments.claims.record import Chapter, Words

chapter = Chapter("B", Words("", ""))
