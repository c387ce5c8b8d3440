"""Looking inside: traces, comparisons. Imports anything; nothing on the serving path imports it."""
