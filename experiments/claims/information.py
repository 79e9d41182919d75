"""Chapter E."""

from experiments.claims.record import Chapter, Words

chapter = Chapter("E", Words("", ""))
