"""What is written from the rows: the log, the README, the ladders' pages; and whether it is up to date."""
