"""Chapter J."""

from experiments.claims.record import Chapter, Words

chapter = Chapter("J", Words("", ""))
