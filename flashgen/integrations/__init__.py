"""What lets programs that were written for other libraries call flashgen; nothing here is imported unless asked for."""
