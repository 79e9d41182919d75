"""Chapter I."""

from experiments.claims.record import Chapter, Words

chapter = Chapter("I", Words("", ""))
