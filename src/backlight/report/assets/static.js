// A report that was written: everything is there.

drawOnce();
