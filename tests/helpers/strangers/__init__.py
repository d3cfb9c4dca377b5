"""Extensions as a user would write them, in files outside of the package."""
