"""States that come from elsewhere: which parameter they are of, checks, and full state dicts.

May import `tensor` and what lies below. Nothing is written before everything was checked on all
ranks; buckets and hooks are not known here.
"""
