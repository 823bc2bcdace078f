"""Programs as artefacts: the saved directory and the formats of other tools."""
