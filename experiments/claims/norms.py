"""Chapter C."""

from experiments.claims.record import Chapter, Words

chapter = Chapter("C", Words("", ""))
