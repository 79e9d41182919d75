"""Chapter F."""

from experiments.claims.record import Chapter, Words

chapter = Chapter("F", Words("", ""))
