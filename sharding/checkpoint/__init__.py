"""States that come from elsewhere: names, what is checked before a load, and full state dicts.

May import `tensor` and what lies below. Nothing is written before everything was checked on all
ranks; buckets and hooks are not known here.
"""
