"""Chapter G."""

from experiments.claims.record import Chapter, Words

chapter = Chapter("G", Words("", ""))
