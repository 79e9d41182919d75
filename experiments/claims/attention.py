"""Chapter H."""

from experiments.claims.record import Chapter, Words

chapter = Chapter("H", Words("", ""))
