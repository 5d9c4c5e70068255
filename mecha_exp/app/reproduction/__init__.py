"""Making a result again from its record, and comparing the two."""
