"""What several test files share; no test file imports another."""
