"""Rows in Redis servers, of one machine or of many."""
