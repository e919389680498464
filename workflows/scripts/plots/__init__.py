"""Drawing: one module for each exhibit, named as its id with an underscore; each offers ``draw(table) -> Figure``."""
