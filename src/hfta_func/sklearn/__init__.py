"""Arrays as estimators of scikit-learn, with one model per group; ``pip install 'hfta_func[sklearn]'``."""

from hfta_func.sklearn.estimators import ArrayClassifier as ArrayClassifier
from hfta_func.sklearn.estimators import ArrayRegressor as ArrayRegressor
from hfta_func.sklearn.search import ArraySearchCV as ArraySearchCV
from hfta_func.sklearn.search import cross_val_score as cross_val_score
