"""Which states of recurrent layers a prefix cache keeps: tokens computed and bytes held, by policy."""
